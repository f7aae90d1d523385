"""The places of programs until the next release, for the units of older playbooks."""
