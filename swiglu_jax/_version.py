"""The package's version, as its metadata has it."""

from importlib import metadata

try:
    __version__ = metadata.version("swiglu-jax")
except metadata.PackageNotFoundError:  # a source tree on sys.path, not installed
    __version__ = "0+unknown"
