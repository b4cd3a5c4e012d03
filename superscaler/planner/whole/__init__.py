"""Plans that a search compiles whole: on lines through smaller ones, certified, and in better orders."""
