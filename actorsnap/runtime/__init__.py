"""Where things run: the runtime's thread, its worker threads and its memory."""
