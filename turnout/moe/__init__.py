"""The MoE layer: route -> dispatch -> experts -> combine, planned before it runs."""
