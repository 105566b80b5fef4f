"""Plugins: found, checked and chosen."""
