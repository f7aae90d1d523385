"""`python -m gateway.tools.local.embedded`, as units of older playbooks start it."""

from gateway.local.embedded import main

if __name__ == "__main__":
    main()
