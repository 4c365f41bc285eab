"""`python -m polyport.cli`."""

from polyport.cli import main

if __name__ == "__main__":
    main()
