"""What other projects' trainers plug in, one module for each. A module needs the project that it is named after."""
