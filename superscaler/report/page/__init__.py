"""The page of `superscaler report`: its parts as HTML, its data, and the script that draws them."""
