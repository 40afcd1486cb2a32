"""The operators, one folder each; each folder's README.md has the mathematics."""
