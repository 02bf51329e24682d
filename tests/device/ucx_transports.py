"""Print the transports that the UCX of NIXL's wheel finds: `python -m tests.device.ucx_transports`.

A program of its own: UCX reads its environment once, and a broken driver may crash it.
"""

import ctypes
import sys
from pathlib import Path

from kvflow.backends.nixl.library import load

FEATURES = 1
"""Field of ucp_params_t that is set."""

TAG, RMA, AM = 1, 2, 8


def main() -> None:
    """Let UCX describe a context."""
    package = Path(str(load().__file__)).parent
    library = next(package.with_name(f"{package.name}.libs").glob("libucp-*"))
    ucp, libc = ctypes.CDLL(str(library)), ctypes.CDLL(None)
    major, minor, release, context = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint(), ctypes.c_void_p()
    ucp.ucp_get_version(ctypes.byref(major), ctypes.byref(minor), ctypes.byref(release))
    parameters = (ctypes.c_uint64 * 64)(FEATURES, TAG | RMA | AM)
    status = ucp.ucp_init_version(major, minor, parameters, None, ctypes.byref(context))
    if status:
        sys.exit(f"UCX does not start: {status}")
    libc.fdopen.restype = ctypes.c_void_p
    ucp.ucp_context_print_info(context, ctypes.c_void_p(libc.fdopen(1, b"w")))
    libc.fflush(None)
    sys.stdout.write(f"UCX {major.value}.{minor.value}.{release.value}\n")


if __name__ == "__main__":
    main()
