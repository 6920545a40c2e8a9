"""One unbroken sequence: the accept rule of every reader, and what redundant publishers add to it."""
