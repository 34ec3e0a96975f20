"""The monitor in other trainers than Lightning's; a module for each, named after the library that it needs."""
