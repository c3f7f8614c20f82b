//! All commands of the human monitor. Help, completion and the table in `docs/control.md` are generated from this table.

/// A command of the human monitor, or a topic of `info`.
pub struct HmpCommand {
    /// Names of the command. The first one is shown in the help.
    pub names: &'static [&'static str],
    /// Arguments, as text for the help.
    pub arguments: &'static str,
    /// Letters of the flags that the command accepts.
    pub flags: &'static str,
    /// Description in one line.
    pub help: &'static str,
    /// Name of the QMP command that executes this command.
    pub qmp: &'static str,
}

/// All commands.
pub static COMMANDS: &[HmpCommand] = &[
    HmpCommand {
        names: &["cont", "c"],
        arguments: "",
        flags: "",
        help: "let the guest run",
        qmp: "cont",
    },
    HmpCommand {
        names: &["help", "?"],
        arguments: "[command]",
        flags: "",
        help: "show the commands, or one of them; 'help migrate_set_parameter' lists parameters",
        qmp: "",
    },
    HmpCommand {
        names: &["info"],
        arguments: "[what]",
        flags: "",
        help: "show information; 'help info' lists the subjects",
        qmp: "",
    },
    HmpCommand {
        names: &["migrate"],
        arguments: "[-d] [-r] uri",
        flags: "dr",
        help: "migrate the guest to uri; with -d the monitor does not wait for the end; -r resumes a paused postcopy",
        qmp: "migrate",
    },
    HmpCommand {
        names: &["migrate_cancel"],
        arguments: "",
        flags: "",
        help: "cancel the migration; the guest keeps running here",
        qmp: "migrate_cancel",
    },
    HmpCommand {
        names: &["migrate_continue"],
        arguments: "state",
        flags: "",
        help: "continue a migration that waits in state (pre-switchover)",
        qmp: "migrate-continue",
    },
    HmpCommand {
        names: &["migrate_incoming"],
        arguments: "uri",
        flags: "",
        help: "listen at uri for a source, after '--incoming defer'",
        qmp: "migrate-incoming",
    },
    HmpCommand {
        names: &["migrate_pause"],
        arguments: "",
        flags: "",
        help: "pause a postcopy migration, as if its connection was lost",
        qmp: "migrate-pause",
    },
    HmpCommand {
        names: &["migrate_recover"],
        arguments: "uri",
        flags: "",
        help: "listen at uri for the source of a guest that lost its connection in postcopy",
        qmp: "migrate-recover",
    },
    HmpCommand {
        names: &["migrate_set_capability"],
        arguments: "capability on|off",
        flags: "",
        help: "switch a capability of migrations",
        qmp: "migrate-set-capabilities",
    },
    HmpCommand {
        names: &["migrate_set_parameter"],
        arguments: "parameter value",
        flags: "",
        help: "set a parameter of migrations; sizes take K, M, G or T, bandwidths are MiB/s without",
        qmp: "migrate-set-parameters",
    },
    HmpCommand {
        names: &["migrate_start_postcopy"],
        arguments: "",
        flags: "",
        help: "run the guest at the destination before all its pages have arrived (needs postcopy-ram)",
        qmp: "migrate-start-postcopy",
    },
    HmpCommand {
        names: &["quit", "q"],
        arguments: "",
        flags: "",
        help: "end the process and its guest",
        qmp: "quit",
    },
    HmpCommand {
        names: &["stop", "s"],
        arguments: "",
        flags: "",
        help: "stop the guest",
        qmp: "stop",
    },
];

/// Topics of `info`.
pub static INFO: &[HmpCommand] = &[
    HmpCommand {
        names: &["migrate"],
        arguments: "[-a]",
        flags: "a",
        help: "show the progress of the migration; with -a all of its figures",
        qmp: "query-migrate",
    },
    HmpCommand {
        names: &["migrate_capabilities"],
        arguments: "",
        flags: "",
        help: "show the capabilities of migrations",
        qmp: "query-migrate-capabilities",
    },
    HmpCommand {
        names: &["migrate_parameters"],
        arguments: "",
        flags: "",
        help: "show the parameters of migrations",
        qmp: "query-migrate-parameters",
    },
    HmpCommand {
        names: &["status"],
        arguments: "",
        flags: "",
        help: "show whether the guest runs",
        qmp: "query-status",
    },
    HmpCommand {
        names: &["version"],
        arguments: "",
        flags: "",
        help: "show the version",
        qmp: "query-version",
    },
];

impl HmpCommand {
    /// Returns all names of the command, as in QEMU's error messages: `cont|c`.
    pub fn title(&self) -> String {
        self.names.join("|")
    }

    /// Returns the help line of the command.
    pub fn usage(&self) -> String {
        format!("{} {} -- {}", self.title(), self.arguments, self.help)
    }
}

/// Returns the row with this name in `table`; `None` if there is none.
pub fn find(table: &'static [HmpCommand], name: &str) -> Option<&'static HmpCommand> {
    table.iter().find(|command| command.names.contains(&name))
}
