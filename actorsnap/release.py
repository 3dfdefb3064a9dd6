# SPDX-License-Identifier: Apache-2.0
"""The release of this package; the same as in its metadata."""

RELEASE = "0.1.0"
