"""``python -m actorsnap``."""

from actorsnap.cli import main

main()
