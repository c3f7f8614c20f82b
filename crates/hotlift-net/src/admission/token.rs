//! The token that binds connections to a conversation, so that they belong to its peer.

use hotlift_tls::Exporter;

use super::admitted::Admitted;
use super::connection_class::ConnectionClass;
use crate::transport::Stream;

/// The right to open connections of one migration.
#[derive(Debug, Clone)]
pub struct ConnectionToken {
    token: [u8; 16],
    conversation: Option<Exporter>,
}

impl ConnectionToken {
    /// Creates it from `token`, random bytes that one side sent in a conversation. `conversation` is the exporter of the
    /// conversation's TLS connection ([`Stream::exporter`]).
    #[must_use]
    pub fn new(token: [u8; 16], conversation: Option<Exporter>) -> Self {
        Self {
            token,
            conversation,
        }
    }

    /// Returns the token to present on `stream`. If the conversation and `stream` use TLS, this is a proof that both have the
    /// same two ends. The proof is valid only on `stream`, so a stolen one is useless.
    #[must_use]
    pub fn token_on(&self, stream: &Stream) -> [u8; 16] {
        let proof = self
            .conversation
            .as_ref()
            .zip(stream.exporter())
            .and_then(|(conversation, data)| conversation.proof(data).first_chunk().copied());
        proof.unwrap_or(self.token)
    }

    /// Returns true if `one` begins with the required token.
    #[must_use]
    pub fn is_presented_by(&self, one: &Admitted) -> bool {
        matches!(one.head(), ConnectionClass::Token(token) if token == self.token_on(&one.stream))
    }
}
