"""Workers under load while everything breaks that can; and an audit of what they did."""
