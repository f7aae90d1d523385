"""Carrying a stream on elsewhere when its node dies, so that the client sees one stream.

`said` keeps what has gone out, `bounds` tells where no sound continuation is possible, `seam` finds
where the next node takes over, `bodies` writes what it is asked, and `joining` makes its events
those of the first stream. docs/reliability.md says what is promised.
"""
