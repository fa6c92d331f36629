"""The exported kernels: their sources, the recipes that compile them, and their manifest.

Only the manifest is read when a model runs; everything else is the build's.
"""
