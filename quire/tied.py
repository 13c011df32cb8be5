"""``python -m quire.tied PID PACKAGE [ARGS]``: becomes ``python -m PACKAGE ARGS``, tied to its parent's life.

On Linux the kernel then kills the process when the parent ends, however that is: a launcher that was killed leaves
nothing behind. Elsewhere only an orderly end of the launcher ends its children.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ties this process to its parent and replaces it by the package's process."""
    parent, package, *args = sys.argv[1:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The tie holds through exec, but not for a parent that was gone before it was made.
    if os.getppid() != int(parent):
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, "-m", package, *args])


if __name__ == "__main__":
    main()
