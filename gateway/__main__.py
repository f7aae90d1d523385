"""`python -m gateway` is the command `llama-gateway`."""

from gateway.cli import main

if __name__ == "__main__":
    main()
