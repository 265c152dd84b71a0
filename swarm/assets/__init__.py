"""Data files that are shipped with the package; read through importlib.resources."""
