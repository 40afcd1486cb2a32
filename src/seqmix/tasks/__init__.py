"""What is learnt: each task is a LightningDataModule whose rows are a pure function of (seed, split, index)."""
