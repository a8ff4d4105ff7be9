"""Compressors: one algorithm, one file. :mod:`gradcomp.registry` finds them by name."""
