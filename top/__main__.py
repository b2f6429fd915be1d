"""`python -m splitc`, which is the command `splitc`."""

from __future__ import annotations

from splitc.runtime.__main__ import main

if __name__ == "__main__":
    main()
