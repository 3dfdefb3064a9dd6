"""The release of this package; the same as in its metadata."""

RELEASE = "0.1.0"
