"""`python -m gateway.tools.local.memory`, as units of older playbooks start it."""

from gateway.local.memory import main

if __name__ == "__main__":
    main()
