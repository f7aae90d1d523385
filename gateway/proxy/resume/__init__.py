"""Resuming a stream on another node when its node dies, so that the client sees one stream.

`plan` asks the replacement node how to continue; `resumer` leases it and joins its stream to the
first. What each API contributes is in its module (`gateway.proxy.api`), and below both lie the
transcript and the splice point. docs/reliability.md says what is promised.
"""
