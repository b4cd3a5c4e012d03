"""The transfers of the clock: posts of cohorts on their streams, and the ports that transfers share."""
