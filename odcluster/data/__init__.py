"""Room 1, pixels in: sources of images, their order, and the views a network sees."""
