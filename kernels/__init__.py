"""Kernels: one op list (:mod:`gradcomp.kernels.ops`), one module per backend that implements it.

``reference``  plain torch, any device; the oracle that the others are compared with
``cpu``        numba, one fused pass per kernel, releases the GIL
``cuda``       own CUDA kernels, launched through CuPy
"""

if __name__ != "gradcomp.kernels":
    raise ImportError(
        "this folder is the package gradcomp.kernels (gradcomp/kernels links to it): write `import gradcomp.kernels`. "
        "If you meant Hugging Face's `kernels`, run from another folder (`pytest`, not `python -m pytest`)."
    )
