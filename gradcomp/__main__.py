"""``python -m gradcomp``: the same as the ``gradcomp`` command."""

from gradcomp.cli import main

if __name__ == "__main__":
    main()
