"""LightningDataModules that ship with the package."""
