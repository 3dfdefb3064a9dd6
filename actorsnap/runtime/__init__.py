"""The runtime: its loop thread, worker threads and memory."""
