"""The SM90 kernels alone against cuBLAS: for whoever changes a tile or the main loop.

    python -m benchmarks.kernels.build FOLDER [PATTERN]     # anywhere; needs the DSL, no GPU
    python benchmarks/kernels/measure.py FOLDER M,H,I ...   # on the GPU; needs torch and tvm_ffi
    python benchmarks/kernels/gradients.py                  # on the GPU; needs the built package
    python -m benchmarks.kernels.trials FOLDER TILE ...     # anywhere: other tiles than the shipped
    python -m benchmarks.kernels.try_tiles FOLDER           # on the GPU; needs the built package

The folder travels; the second machine needs neither the DSL nor the CUDA toolkit. gradients.py
times the kernels that are installed, against XLA's GEMMs; try_tiles.py does so with tiles that
trials.py compiled beside the installed ones.
"""
