"""The configurations that ship with pflight; from an installed wheel, reach them by resource.

Example:
    >>> from importlib.resources import files
    >>> (files("pflight.configs") / "algorithm").is_dir()
    True
"""
