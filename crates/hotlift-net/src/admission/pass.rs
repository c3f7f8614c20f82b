//! What opens the connections that a conversation has announced, so that they belong to the host that it was held with.

use hotlift_tls::Exporter;

use super::admitted::Admitted;
use super::head::Head;
use crate::transport::Stream;

/// The right to open the connections of one migration.
#[derive(Debug, Clone)]
pub struct Pass {
    token: [u8; 16],
    conversation: Option<Exporter>,
}

impl Pass {
    /// That of `token`, which one side has made and the other was told in a conversation; `conversation` is that of a TLS
    /// connection ([`Stream::exporter`]).
    #[must_use]
    pub fn new(token: [u8; 16], conversation: Option<Exporter>) -> Self {
        Self {
            token,
            conversation,
        }
    }

    /// What is shown on `stream`. Between two TLS connections it is a proof that both have the same two ends, and fits no
    /// third one: whoever has read the token has no use of it.
    #[must_use]
    pub fn token_on(&self, stream: &Stream) -> [u8; 16] {
        let proof = self
            .conversation
            .as_ref()
            .zip(stream.exporter())
            .and_then(|(conversation, data)| conversation.proof(data).first_chunk().copied());
        proof.unwrap_or(self.token)
    }

    /// Returns true if `one` begins with the token that it must show.
    #[must_use]
    pub fn is_shown_by(&self, one: &Admitted) -> bool {
        matches!(one.head(), Head::Token(token) if token == self.token_on(&one.stream))
    }
}
