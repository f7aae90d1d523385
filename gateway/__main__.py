"""`python -m gateway` is the command `llama-gateway`."""

from gateway.tools.cli import main

if __name__ == "__main__":
    main()
