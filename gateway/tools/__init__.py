"""Old names of two programs of `local`, which units of older playbooks start; gone next release."""
