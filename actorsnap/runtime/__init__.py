"""The runtime: loop thread, worker threads, memory."""
