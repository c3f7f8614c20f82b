//! The main channel.
