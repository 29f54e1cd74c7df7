"""What another setting would have done: the requests of a recording, played through the real scheduler, allocator and
tree on a device that costs what the recording's steps cost."""
