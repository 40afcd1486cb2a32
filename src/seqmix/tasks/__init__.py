"""Tasks: each is a LightningDataModule whose rows are a pure function of (seed, split, index)."""
