"""Kernels: move and shrink paged KV. Arrays in, arrays out; a kernel knows no chunk, tier or policy.

One operation a file: `<op>.py` holds the contract, the plain reference that defines the bytes, and the dispatch;
`<op>_numba.py` and `<op>_triton.py` hold the fast versions and are imported when they are first called.

    pages       whole pages <-> chunks                  quantize   KV in pages <-> 8 to 2 bit codes, gather fused
    slots       single tokens <-> plain arrays          rotate     Hadamard rotation before low-bit quantisation
    byteplanes  16-bit values <-> two byte planes       entropy    rANS coder for small alphabets
    exponents   of 16-bit values, coded in levels of two bits
    symbols     uniform quantisation into symbols       rope       keys turned back by their rotary position
    tiles       where the (block, head) tiles of K or of V lie in a paged cache
    threads     a kernel's units of work over several threads
    timing      one timer: repeats, and bytes/s as a ratio to a plain copy in the same run
"""

from importlib import metadata as _metadata


def _refuse_the_other_kernels() -> None:
    """Hugging Face publishes a distribution that installs a top-level package of this very name."""
    try:
        other = _metadata.distribution("kernels")
    except _metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"the distribution 'kernels' {other.version} (Hugging Face) is installed beside kvworkbench; both install a "
        "package named 'kernels', and transformers would import the wrong one. Run: pip uninstall kernels"
    )


_refuse_the_other_kernels()
