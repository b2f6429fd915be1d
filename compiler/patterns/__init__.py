"""What all fusion uses: sizes that are equal for any request, operands of products, new nodes, measured gains."""
