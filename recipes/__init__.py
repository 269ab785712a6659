"""Recipes as package data: `memfit recipes` lists them."""
