//! Method `auto`: what each packet is sent as, by what the link and the cores can do now.
//!
//! | file | subject |
//! |---|---|
//! | `candidates` | what a packet can be sent as |
//! | `costs` | what each candidate costs, by kind of content, as measured |
//! | `controller` | the price of a byte, and the choice |

pub(crate) mod candidates;
pub(crate) mod controller;
pub(crate) mod costs;

#[cfg(test)]
mod simulation;
