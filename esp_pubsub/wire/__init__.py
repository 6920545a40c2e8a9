"""Pure: bytes in, frames and values out. No loop, no socket, no clock."""
