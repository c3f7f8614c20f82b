//! The token with which a connection proves that its client is the peer of a conversation.

use hotlift_tls::Exporter;

use super::admitted::Admitted;
use super::connection_class::ConnectionClass;
use crate::transport::Stream;

/// Token for the connections of one migration. The peer presents the token at the start of each connection.
#[derive(Debug, Clone)]
pub struct ConnectionToken {
    token: [u8; 16],
    conversation: Option<Exporter>,
}

impl ConnectionToken {
    /// Creates the token from the random bytes `token`, which one side sent in the conversation. `conversation` is the TLS
    /// exporter of the conversation's connection ([`Stream::exporter`]); `None` without TLS.
    #[must_use]
    pub fn new(token: [u8; 16], conversation: Option<Exporter>) -> Self {
        Self {
            token,
            conversation,
        }
    }

    /// Returns the token to present on `stream`. If the conversation and `stream` use TLS, the token proves that both have the
    /// same two ends. This token is valid only on `stream`, so a stolen token is useless. Without TLS the function returns the
    /// conversation's token itself.
    #[must_use]
    pub fn token_on(&self, stream: &Stream) -> [u8; 16] {
        let proof = self
            .conversation
            .as_ref()
            .zip(stream.exporter())
            .and_then(|(conversation, data)| conversation.proof(data).first_chunk().copied());
        proof.unwrap_or(self.token)
    }

    /// Returns true if the connection `one` begins with this token.
    #[must_use]
    pub fn is_presented_by(&self, one: &Admitted) -> bool {
        matches!(one.head(), ConnectionClass::Token(token) if token == self.token_on(&one.stream))
    }
}
