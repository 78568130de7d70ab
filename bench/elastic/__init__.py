"""The elastic half, live: real processes on this machine grow, sleep, wake and lose their leader, under clients that
write down what they see."""
