"""LightningModules that ship with the package."""
