"""``python -m pflight`` is the command ``pflight``."""

from .cli import main

if __name__ == "__main__":
    main()
