"""Carrying a stream on elsewhere when its node dies, so that the client sees one stream.

`said` keeps what has gone out, `bounds` tells where no sound continuation is possible, `seam` finds
where the next node takes over, `thought` how a template writes reasoning, `bodies` writes what the
node is asked, and `joining` and `from_native` make its events those of the first stream.
docs/reliability.md says what is promised.
"""
