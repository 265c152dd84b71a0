"""Data files of the package; read through importlib.resources."""
