"""The cheapest paths between layouts R(i)V(j)D(k): a search over collectives, under the costs of a cluster."""
